// Half-written hints. They outlive polling, other trajectories and a reload of the page.

let prefix = "courtside";
const memory = new Map(); // where the browser stores nothing

export function keepFor(run) {
  prefix = `courtside ${run} `;
}

const key = (id, turn) => `${prefix}${turn} ${id}`;

export function draftOf(id, turn) {
  try {
    return localStorage.getItem(key(id, turn));
  } catch {
    return memory.get(key(id, turn)) ?? null;
  }
}

export function keepDraft(id, turn, text) {
  try {
    if (text === null) localStorage.removeItem(key(id, turn));
    else localStorage.setItem(key(id, turn), text);
  } catch {
    if (text === null) memory.delete(key(id, turn));
    else memory.set(key(id, turn), text);
  }
}

// Names of the trajectories with a draft.
export function drafted() {
  let keys = [...memory.keys()];
  try {
    keys = keys.concat(Object.keys(localStorage));
  } catch { /* nothing is stored */ }
  const own = keys.filter((one) => one.startsWith(prefix)).map((one) => one.slice(prefix.length));
  return new Set(own.map((one) => one.slice(one.indexOf(" ") + 1)));
}
