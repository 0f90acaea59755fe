// State that survives: the address has the settings of the open tab, storage has those of all tabs.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

export type Settings = Record<string, string | string[]>;

const MOST_IN_ADDRESS = 8000;
/** Ends the name of a text that the address lacks for its length; the value is the text's digest. */
const LEFT_OUT = "-left-out";
const WRITE_MS = 250;
const changed = new EventTarget();
/** After a reload the tab's own memory is fresher than the address, which is written a moment after each change. */
const isReload = (performance.getEntriesByType("navigation")[0] as PerformanceNavigationTiming | undefined)?.type === "reload";
const addressAtLoad = location.hash;
/** The address that the page shows: a link followed since then is read first, and nothing is written over it. */
let shown = addressAtLoad;

function replaceAddress(hash: string): void {
  history.replaceState(null, "", hash);
  shown = location.hash;
}

export function tabOf(hash: string): string {
  return hash.replace(/^#/, "").split("?")[0] ?? "";
}

function inAddress(tab: string, ...before: Settings[]): Settings | null {
  const [name, query] = location.hash.replace(/^#/, "").split("?");
  if (name !== tab || !query) return null;
  const found: Settings = {};
  const parameters = new URLSearchParams(query);
  for (const key of new Set(parameters.keys())) {
    const values = parameters.getAll(key);
    if (key.endsWith(LEFT_OUT)) {
      const name = key.slice(0, -LEFT_OUT.length);
      found[name] = before.map((one) => one[name]).find((text) => typeof text === "string" && digest(text) === values[0]) ?? "";
      continue;
    }
    found[key.replace(/\[\]$/, "")] = key.endsWith("[]") ? values.filter(Boolean) : (values[0] ?? "");
  }
  return found;
}

export function digest(text: string): string {
  let hash = 0;
  for (let index = 0; index < text.length; index++) hash = (Math.imul(hash, 31) + text.charCodeAt(index)) | 0;
  return `${text.length}.${(hash >>> 0).toString(36)}`;
}

/** Whether a link lacks a text: another browser, which does not know it, has none in its place. */
export function isWithoutText(link: string): boolean {
  return link.includes(`${LEFT_OUT}=`);
}

/** The address of a tab with its settings: a permalink. Long texts stay out of it. */
export function linkTo(tab: string, settings: Settings): string {
  const parameters = new URLSearchParams();
  for (const [key, value] of Object.entries(settings)) {
    if (Array.isArray(value)) for (const item of value.length ? value : [""]) parameters.append(`${key}[]`, item);
    else if (value.length <= MOST_IN_ADDRESS) parameters.append(key, value);
    else parameters.append(`${key}${LEFT_OUT}`, digest(value));
  }
  const query = parameters.toString();
  return query ? `#${tab}?${query}` : `#${tab}`;
}

function fitting(found: Settings, defaults: Settings): Settings {
  const kept = Object.entries(found).filter(
    ([key, value]) => key in defaults && Array.isArray(value) === Array.isArray(defaults[key]),
  );
  return { ...defaults, ...Object.fromEntries(kept) };
}

/**
 * Settings of a tab: each from the address, else from an earlier visit, else the default. Those of earlier visits are
 * forgotten unless they are `allowed`.
 */
export function useSettings<T extends Settings>(
  tab: string,
  defaults: T,
  allowed: Record<string, string[]> = {},
): [T, (change: Partial<T>) => void] {
  const key = `ropeway.${tab}`;
  const isAllowed = ([name, value]: [string, unknown]) => allowed[name]?.includes(value as string) ?? true;
  const remembered = (storage: Storage): Settings =>
    Object.fromEntries(Object.entries(stored<Settings>(storage, key) ?? {}).filter(isAllowed));
  const read = () => {
    const everywhere = remembered(localStorage);
    return fitting({ ...everywhere, ...inAddress(tab, remembered(sessionStorage), everywhere) }, defaults) as T;
  };
  const [settings, set] = useState<T>(() => {
    const isFresher = isReload && (location.hash === addressAtLoad || !inAddress(tab)); // a later link goes first
    return fitting({ ...read(), ...(isFresher && remembered(sessionStorage)) }, defaults) as T;
  });
  const latest = useRef(settings);
  latest.current = settings;
  const write = () => {
    store(localStorage, key, latest.current);
    store(sessionStorage, key, latest.current);
    const link = linkTo(tab, latest.current);
    if (tabOf(location.hash) === tab && location.hash === shown && shown !== link) replaceAddress(link);
  };
  useLayoutEffect(() => { // not a frame later: no change of the address comes between the reading and this
    const reread = () => (inAddress(tab) ? set(read()) : write());
    changed.addEventListener("address", reread);
    addEventListener("pagehide", write);
    return () => {
      changed.removeEventListener("address", reread);
      removeEventListener("pagehide", write);
    };
  }, []);
  useEffect(() => {
    const timer = setTimeout(write, WRITE_MS);
    return () => clearTimeout(timer);
  }, [settings]);
  return [settings, (change) => set((now) => ({ ...now, ...change }))];
}

/** The open tab, by the address; back and forward work. */
export function useTab(tabs: string[]): string {
  const read = () => (tabs.includes(tabOf(location.hash)) ? tabOf(location.hash) : tabs[0]!);
  const [tab, set] = useState(() => {
    if (tabOf(location.hash) !== read()) replaceAddress(`#${read()}`);
    return read();
  });
  useLayoutEffect(() => {
    const follow = () => {
      shown = location.hash;
      set(read());
      changed.dispatchEvent(new Event("address"));
    };
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return tab;
}

export function stored<T>(storage: Storage, key: string): T | null {
  try {
    return JSON.parse(storage.getItem(key) ?? "null");
  } catch {
    return null;
  }
}

export function store(storage: Storage, key: string, value: unknown): void {
  try {
    storage.setItem(key, JSON.stringify(value));
  } catch {
    storage.removeItem(key); // full: the page works without it
  }
}
