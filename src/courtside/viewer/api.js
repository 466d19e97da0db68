// Requests to the server. The message of an ApiError says what to do.

import { byId } from "./dom.js";

const token = document.querySelector('meta[name="courtside-token"]').content;

export class ApiError extends Error {}

export class Unreachable extends Error {}

export const get = (path) => request("GET", path);

export const send = (method, path, body = {}) => request(method, path, {
  headers: { "Content-Type": "application/json", "X-Courtside-Token": token },
  body: JSON.stringify(body),
});

export const apiPath = (key, id, turn) =>
  `/api/batches/${encodeURIComponent(key)}/trajectories/${encodeURIComponent(id)}${turn === undefined ? "" : `/hints/${turn}`}`;

async function request(method, path, options = {}) {
  let response;
  try {
    response = await fetch(path, { method, cache: "no-store", ...options });
  } catch {
    byId("unreachable").textContent =
      "The viewer does not answer: it was stopped, or the connection is lost. Unsaved text "
      + "stays in this browser. Start “courtside view” again with the same port, then reload the page.";
    byId("unreachable").hidden = false;
    throw new Unreachable("the viewer does not answer");
  }
  byId("unreachable").hidden = true;
  const answer = await response.json().catch(() => ({ detail: `the server failed (${response.status})` }));
  if (!response.ok) throw new ApiError(answer.detail);
  return answer;
}
