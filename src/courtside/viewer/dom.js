// Elements of the page. Text of models, tasks and tools only ever becomes text nodes.

export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

export const byId = (id) => document.getElementById(id);

export const pluralize = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

export const readableName = (name) => name.replaceAll("_", " ");

export function formatNats(value) {
  const sign = value < 0 ? "−" : "+";
  return `${sign}${Math.abs(value).toFixed(2)} nats`;
}

export function badge(kind, text, title) {
  return make("span", { class: `badge ${kind}`, title: title || null }, text);
}

export function gradeBadge(grade) {
  if (!grade) return null;
  const label = grade.passed ? "passed" : "failed";
  return badge(label, label, grade.feedback || `score ${grade.score}`);
}

const STOP_REASONS = { length: " (truncated)", time: " (out of time)", turns: " (out of turns)" };

// "5 turns · 2 errors · 81 tokens"; errors are turns with an error.
export function describeRow(row) {
  const parts = [pluralize(row.turns, "turn")];
  if (row.errors) parts.push(pluralize(row.errors, "error"));
  parts.push(pluralize(row.tokens, "token") + (STOP_REASONS[row.stop] || ""));
  return parts.join(" · ");
}

// Nodes of a text with the first occurrence of each span underlined.
export function underlineSpans(text, spans) {
  const ranges = spans
    .filter((span) => span && text.includes(span))
    .map((span) => [text.indexOf(span), text.indexOf(span) + span.length])
    .sort((a, b) => a[0] - b[0]);
  const parts = [];
  let at = 0;
  for (const [start, end] of ranges) {
    if (start < at) continue;
    parts.push(text.slice(at, start), make("span", { class: "bad" }, text.slice(start, end)));
    at = end;
  }
  parts.push(text.slice(at));
  return parts;
}

// A long text is collapsed to its first characters.
export function collapsible(text, limit) {
  const box = make("div", { class: "text" });
  if (text.length <= limit * 1.3) {
    box.append(text);
    return box;
  }
  const content = document.createTextNode("");
  const button = make("button", { type: "button", class: "fold" });
  const set = (open) => {
    content.data = open ? text : `${text.slice(0, limit).trimEnd()} …`;
    button.textContent = open ? "collapse" : `show all ${pluralize(text.length, "character")}`;
    button.setAttribute("aria-expanded", String(open));
  };
  button.addEventListener("click", () => set(button.getAttribute("aria-expanded") !== "true"));
  set(false);
  box.append(content, make("br"), button);
  return box;
}

let hideTimer = 0;

// A short notice, with at most one action.
export function notify(text, action) {
  const box = byId("notice");
  clearTimeout(hideTimer);
  box.replaceChildren(text);
  if (action) {
    const done = () => { box.hidden = true; action.run(); };
    box.append(make("button", { type: "button", onclick: done }, action.name));
  }
  box.hidden = false;
  hideTimer = setTimeout(() => { box.hidden = true; }, action ? 9000 : 4000);
}
