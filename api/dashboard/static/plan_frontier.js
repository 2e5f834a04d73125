// The chart of cost against deadline: the line of the deadline follows the slider, the star glides to the new plan.
import { draw } from "./charts.js";
import { frontier_figure, limit_marks } from "./plan_figures.js";

const GLIDE_MS = 160;
const still = window.matchMedia("(prefers-reduced-motion: reduce)");

export class Frontier {
  constructor(element) {
    this.element = element;
    this.figure = null;
    this.gliding = 0;
  }

  // A new curve, drawn from scratch.
  show(curve, limits, point) {
    this.curve = curve;
    this.limits = limits;
    this.point = point;
    this.figure = frontier_figure(curve, limits, point);
    cancelAnimationFrame(this.gliding);
    return draw(this.element, this.figure);
  }

  // Only the limits moved; the plan comes later.
  mark(limits) {
    this.limits = limits;
    if (this.figure) this.change(this.point);
  }

  // The plan (or none) under the present limits.
  move(limits, point) {
    this.limits = limits;
    const from = this.point;
    this.point = point;
    if (!this.figure) return;
    cancelAnimationFrame(this.gliding);
    if (point && point.cost_usd > this.figure.top_usd) return void this.show(this.curve, limits, point);
    if (!from || !point || still.matches) return void this.change(point);
    const began = performance.now();
    const frame = (now) => {
      const share = Math.min((now - began) / GLIDE_MS, 1);
      const eased = 1 - (1 - share) ** 3;
      const between = (key) => from[key] + (point[key] - from[key]) * eased;
      this.change({ jct_s: between("jct_s"), cost_usd: between("cost_usd") });
      if (share < 1) this.gliding = requestAnimationFrame(frame);
    };
    this.gliding = requestAnimationFrame(frame);
  }

  change(point) {
    const { unit_s, far_s, top_usd, data, layout } = this.figure;
    const star = data.at(-1);
    star.x = point ? [point.jct_s / unit_s] : [];
    star.y = point ? [point.cost_usd] : [];
    Object.assign(layout, limit_marks(this.limits, unit_s, far_s, top_usd));
    window.Plotly?.update(this.element, { x: [star.x], y: [star.y] },
      { shapes: layout.shapes, annotations: layout.annotations }, [data.length - 1]);
  }
}
