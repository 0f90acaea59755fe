// The key of a start whose answers have not all come: sent again after a reload, it finds the jobs that it made.
import { digest, store, stored } from "../view";
import type { Body } from "./bodies";

const PENDING = "ropeway.starting";

type Pending = { key: string; of: string };

function pending(of: string): Pending | null {
  const found = stored<Pending>(sessionStorage, PENDING);
  return found?.of === of ? found : null;
}

export function isPending(wanted: Body[]): boolean {
  return pending(digest(JSON.stringify(wanted))) !== null;
}

/** The key of this start: the same until `forgetKey`, over reloads too. */
export function keyOf(wanted: Body[]): string {
  const of = digest(JSON.stringify(wanted));
  const before = pending(of);
  if (before) return before.key;
  const key = crypto.getRandomValues(new Uint32Array(4)).join("-"); // randomUUID needs HTTPS
  store(sessionStorage, PENDING, { key, of });
  return key;
}

export function forgetKey(): void {
  sessionStorage.removeItem(PENDING);
}
