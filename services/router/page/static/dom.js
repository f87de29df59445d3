// Creates elements, and formats numbers.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function formatNumber(value, digits = 2) {
  if (value === null || !Number.isFinite(value)) return "–";
  if (Math.abs(value) >= 100) return Math.round(value).toLocaleString("en");
  return value.toFixed(value >= 10 ? Math.min(digits, 1) : digits);
}

export const formatShare = (value) => (value === null ? "–" : `${Math.round(100 * value)} %`);

export const formatMs = (seconds) => (seconds === null ? "–" : `${formatNumber(1e3 * seconds)} ms`);
