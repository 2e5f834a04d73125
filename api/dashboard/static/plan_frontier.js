// The chart of cost against deadline. The deadline's line and the plan's star lie above it and move by themselves, as to
// draw the chart again for every step of the slider would take too long.
import { draw } from "./charts.js";
import { byId, show } from "./dom.js";
import { frontier_figure } from "./plan_figures.js";

export class Frontier {
  constructor(element) {
    this.element = element;
    this.figure = null;
    this.line = byId("at-deadline");
    this.star = byId("at-plan");
    new ResizeObserver(() => requestAnimationFrame(() => this.place())).observe(element);
  }

  // A new curve, drawn from scratch.
  async show(curve, limits, point) {
    this.curve = curve;
    this.limits = limits;
    this.point = point;
    this.figure = frontier_figure(curve, limits, point);
    await draw(this.element, this.figure);
    this.place();
  }

  // Only the limits moved; the plan comes later.
  mark(limits) {
    this.limits = limits;
    this.place();
  }

  // The plan (or none) under the present limits.
  move(limits, point) {
    this.limits = limits;
    this.point = point;
    if (!this.figure) return;
    const above = point && point.cost_usd > this.figure.top_usd;
    if (above || limits.max_cost_usd !== this.figure.budget_usd) this.show(this.curve, limits, point);
    else this.place();
  }

  place() {
    const size = this.element._fullLayout?._size;
    if (!this.figure || !size || !this.element.clientWidth) return;
    const { from_s, far_s, top_usd } = this.figure;
    const across = (at_s) => size.l + (size.w * (at_s - from_s)) / (far_s - from_s);
    const { deadline_s } = this.limits;
    show(this.line, deadline_s !== null && deadline_s >= from_s && deadline_s <= far_s);
    this.line.style.top = `${size.t}px`;
    this.line.style.height = `${size.h}px`;
    this.line.style.transform = `translateX(${across(deadline_s)}px)`;
    show(this.star, this.point !== null && this.point.jct_s <= far_s);
    if (!this.point) return;
    const down = size.t + size.h * (1 - this.point.cost_usd / top_usd);
    this.star.style.transform = `translate(${across(this.point.jct_s)}px, ${down}px)`;
  }
}
