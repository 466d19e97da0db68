// The steps of a run, and the trajectories of one step.

import { draftedIds } from "./drafts.js";
import { byId, describeRow, gradeBadge, make, pluralize } from "./dom.js";

export const filters = { errors: false, hints: false, user_hints: false };

// `matches`: ids that match the search; null: there is no search.
export function filterRows(rows, matches) {
  return rows.filter((row) => (matches === null || matches.has(row.id))
    && Object.entries(filters).every(([name, on]) => !on || row[name] > 0));
}

export function showSteps(steps, current) {
  const select = byId("step");
  const labels = steps.map((step) => stepLabel(step));
  const same = select.options.length === steps.length
    && steps.every(({ step }, i) => select.options[i].value === String(step) && select.options[i].text === labels[i]);
  if (!same) {
    select.replaceChildren(...steps.map(({ step }, i) => make("option", { value: step }, labels[i])));
  }
  if (current !== null) select.value = String(current);
  const index = steps.findIndex(({ step }) => step === current);
  byId("earlier").disabled = index <= 0;
  byId("later").disabled = index < 0 || index + 1 >= steps.length;
  select.disabled = steps.length === 0;
}

function stepLabel({ step, problem, user_hints, errors, trajectories }) {
  if (problem) return `step ${step} · cannot be read`;
  const parts = [`step ${step}`];
  if (user_hints) parts.push(`${user_hints} with my hints`);
  parts.push(errors ? `${errors} of ${trajectories} with errors` : `${trajectories} without errors`);
  return parts.join(" · ");
}

export function showRows(rows, visible, current, step) {
  for (const button of document.querySelectorAll("[data-filter]")) {
    button.setAttribute("aria-pressed", String(filters[button.dataset.filter]));
  }
  byId("count").textContent = visible.length === rows.length
    ? `${rows.length.toLocaleString("en")} ${rows.length === 1 ? "trajectory" : "trajectories"}`
    : `${visible.length} of ${rows.length} trajectories`;
  const drafts = draftedIds();
  const list = byId("rows");
  const scrollTop = list.scrollTop;
  const focused = list.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  list.replaceChildren(...visible.map((row) => item(row, row.id === current, step, drafts.has(row.hints_file_id))));
  if (!visible.length) list.append(make("li", { class: "empty" }, rows.length ? "No matches. Remove a filter." : "This step has no trajectories."));
  list.scrollTop = scrollTop;
  if (focused) [...list.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus({ preventScroll: true });
}

function item(row, isCurrent, step, hasDraft) {
  return make("li", {},
    make("a", { href: `#/${step}/${encodeURIComponent(row.id)}`, title: row.id, "aria-current": isCurrent ? "true" : null },
      make("span", { class: "prompt-line" }, row.prompt),
      make("span", { class: "about" }, gradeBadge(row.grade), make("span", {}, describeRow(row)),
        row.hints ? make("span", { class: "chip" }, pluralize(row.hints, "hint")) : null,
        row.user_hints ? make("span", { class: "chip user-hint" }, pluralize(row.user_hints, "own hint")) : null,
        hasDraft ? make("span", { class: "chip draft" }, "draft") : null)));
}

export function showHintsFile(file) {
  byId("hints-file").replaceChildren(make("b", {}, pluralize(file.count, "hint")), " in ", make("code", {}, file.path));
  byId("problem").hidden = file.problem === null;
  byId("problem").textContent = file.problem === null ? "" : `Hints cannot be saved: ${file.problem}`;
  byId("recipe").textContent = file.recipe.trim();
}
