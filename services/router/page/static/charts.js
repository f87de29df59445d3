// Bar charts with numbers above the bars.

import { element, svg } from "./dom.js";

const HEIGHT = 150;
const MAX_BAR = 34;
const GAP = 4;

// Draws `bars`, of {label, value, text, kind}, into `figure`; shows the text `empty` if there are none.
export function drawBars(figure, bars, empty) {
  const width = figure.clientWidth;
  if (!bars.length || width < 100) {
    figure.replaceChildren(element("p", { class: "empty" }, empty));
    return;
  }
  const step = Math.min(MAX_BAR, width / bars.length);
  const highest = Math.max(...bars.map((bar) => bar.value), 1e-9);
  const scale = (HEIGHT - 40) / highest;
  const texts = bars.filter((bar) => bar.text).map((bar) => `${bar.label}: ${bar.text}`);
  const chart = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, role: "img" });
  chart.setAttribute("aria-label", texts.join(", "));
  bars.forEach((bar, index) => {
    const x = index * step;
    const height = Math.max(1, bar.value * scale);
    const middle = { x: x + (step - GAP) / 2, "text-anchor": "middle" };
    chart.append(
      svg("rect", { class: bar.kind, x, y: HEIGHT - 18 - height, width: step - GAP, height, rx: 1.5 }),
      svg("text", { ...middle, y: HEIGHT - 23 - height, class: "value" }, bar.text),
      svg("text", { ...middle, y: HEIGHT - 4, class: "label" }, bar.label),
    );
  });
  figure.replaceChildren(chart);
}
