// Charts on a phone: the legend stands above what it explains, and panels one below another.
const LETTER_PX = 5.6; // of the legend's font
const ENTRY_PX = 44; // its line, and the gap to the next entry
const ROW_PX = 19;
const PANEL_PX = 170;
const TITLE_PX = 56; // a panel's axis, its title, and the gap below

// A figure's layout in `width` pixels.
export function narrowed({ data, layout }, width) {
  return legendAbove(data, layout.meta?.panels ? oneColumn(layout) : layout, width);
}

function legendAbove(data, layout, width) {
  const names = data.filter(({ name, showlegend }) => name && showlegend !== false).map(({ name }) => name);
  if (!(layout.showlegend ?? names.length > 1)) return layout;
  const line_px = width - (layout.margin?.r ?? 0) - 20;
  const entries_px = names.map((name) => Math.min(name.length * LETTER_PX + ENTRY_PX, line_px));
  const legend_px = Math.ceil(entries_px.reduce((sum, one) => sum + one, 0) / line_px + 0.2) * ROW_PX;
  const margin = { ...layout.margin, t: (layout.margin?.t ?? 24) + legend_px, b: Math.min(layout.margin?.b ?? 90, 50) };
  const legend = { ...layout.legend, orientation: "h", x: 0, y: 1, yref: "container", yanchor: "top", xref: "paper" };
  const height = layout.height + margin.t + margin.b - (layout.margin?.t ?? 24) - (layout.margin?.b ?? 90);
  return { ...layout, legend, margin, height };
}

function oneColumn(layout) {
  const { panels } = layout.meta;
  const margin = { ...layout.margin, b: TITLE_PX };
  const inner = panels * (PANEL_PX + TITLE_PX) - TITLE_PX;
  const whole = { ...layout, margin, height: inner + margin.t + margin.b };
  for (let at = 0; at < panels; at += 1) {
    const top = 1 - (at * (PANEL_PX + TITLE_PX)) / inner;
    const [x, y] = ["xaxis", "yaxis"].map((axis) => `${axis}${at ? at + 1 : ""}`);
    whole[x] = { ...layout[x], domain: [0, 1] };
    whole[y] = { ...layout[y], domain: [Math.max(0, top - PANEL_PX / inner), top], title: layout.yaxis.title, showticklabels: true };
  }
  return whole;
}
