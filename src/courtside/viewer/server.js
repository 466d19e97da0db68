// Questions to the server. A refusal is an error whose message says what to do.

import { byId } from "./parts.js";

const token = document.querySelector('meta[name="courtside-token"]').content;

export class Refusal extends Error {}

export class Gone extends Error {}

export const ask = (path) => request("GET", path);

export const send = (method, path, body = {}) => request(method, path, {
  headers: { "Content-Type": "application/json", "X-Courtside-Token": token },
  body: JSON.stringify(body),
});

export const pathOf = (step, id, turn) =>
  `/api/steps/${step}/trajectories/${encodeURIComponent(id)}${turn === undefined ? "" : `/hints/${turn}`}`;

async function request(method, path, options = {}) {
  let response;
  try {
    response = await fetch(path, { method, cache: "no-store", ...options });
  } catch {
    byId("gone").textContent =
      "The viewer does not answer: it was stopped, or the connection is lost. What you are writing "
      + "is kept in this browser. Start “courtside view” again with the same port, then load the page again.";
    byId("gone").hidden = false;
    throw new Gone("the viewer does not answer");
  }
  byId("gone").hidden = true;
  const answer = await response.json().catch(() => ({ detail: `the server failed (${response.status})` }));
  if (!response.ok) throw new Refusal(answer.detail);
  return answer;
}
