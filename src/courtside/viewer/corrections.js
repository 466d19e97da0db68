// What draft stages and take-overs did with a trajectory: badges, links, critique, rewards.

import { badge, make, pluralize } from "./dom.js";

const CORRECTIONS = {
  choose: ["chosen", "ranked above another sample of its prompt (drafts.kind = choose)"],
  rewrite: ["repair", "a model repaired the student’s draft (drafts.kind = rewrite)"],
  takeover: ["take-over", "the teacher plays on from one of the draft’s states (takeover)"],
};
const PREFERENCES = { better: "the better one of a preference pair", worse: "the worse one of a preference pair" };

const correctionName = ({ correction }) => CORRECTIONS[correction]?.[0] ?? correction;

function relationName(related, isChosen) {
  if (related.relation === "draft") return isChosen ? "‹ the rejected sample" : "‹ its draft";
  if (related.relation === "pair") return `the ${related.preference} one of its pair ›`;
  if (related.is_pair_copy) return `the ${related.preference} side of its ${correctionName(related)} pair ›`;
  return related.correction === "choose" ? "chosen above it ›" : `its ${correctionName(related)} ›`;
}

// Of a row of the list or a trajectory.
export function correctionBadges(row) {
  return [
    row.correction && !row.is_pair_copy ? badge("corrected", correctionName(row), CORRECTIONS[row.correction]?.[1]) : null,
    row.preference ? badge("corrected", row.preference, PREFERENCES[row.preference]) : null,
    row.is_pair_copy ? badge("corrected", "pair copy", "repeats one turn as a member of a preference pair; trains in no other loss") : null,
    row.has_critique ? badge("corrected", "criticized") : null,
  ];
}

// "rewards: grade 1, length −0.25 · 3 tokens replaced by the teacher"; empty without any.
export function describeScores({ rewards, num_replaced }) {
  const parts = [];
  const values = Object.entries(rewards).map(([name, value]) =>
    `${name} ${value === null ? "not computed" : String(Number(Number(value).toPrecision(3))).replace("-", "−")}`);
  if (values.length) parts.push(`rewards: ${values.join(", ")}`);
  if (num_replaced !== null) parts.push(`${pluralize(num_replaced, "token")} replaced by the teacher`);
  return parts.join(" · ");
}

// Links to the draft, its corrections and the other member of a pair; null without any.
export function relatedLinks(trajectory) {
  const links = trajectory.related.map((related) => make("a", {
    class: "related", title: related.id,
    href: `#/${encodeURIComponent(trajectory.key)}/${encodeURIComponent(related.id)}`,
  }, relationName(related, trajectory.correction === "choose")));
  if (trajectory.draft !== null && !trajectory.related.some(({ relation }) => relation === "draft")) {
    links.unshift(make("span", {}, `its draft ${trajectory.draft} is not stored`));
  }
  return links.length ? make("p", { class: "about" }, ...links) : null;
}

export function critiqueEntry({ critique }) {
  return critique
    ? make("div", { class: "entry hint critique" }, make("b", {}, "critique"), make("div", { class: "text" }, critique))
    : null;
}

// Where a turn of a correction is no longer the student's; null for other turns.
export function forkMark({ correction }, { fork }) {
  if (fork === null) return null;
  const after = fork ? ` after ${pluralize(fork, "token")} of the student` : "";
  return make("p", { class: "fork" }, correction === "takeover" ? `the teacher takes over${after}` : "the repaired turn");
}
