// Texts for people.
import type { Pe } from "./types";

const MOST_NUMBERS = 4;
const MARK = /[,()[\]{}"\\]/;

/** An encoding's request in the short form that gives it back, as `patches/shorthand.py` reads it; long lists are left out. */
export function shortText({ method, ...parameters }: Record<string, unknown>): string {
  if (method === "auto") return "auto"; // its ranges are the server's
  const given = Object.entries(parameters).filter(([, value]) => value !== null);
  return [String(method), given.map(([name, value]) => `${name}=${written(value)}`).join(",")].filter(Boolean).join(":");
}

function written(value: unknown): string {
  if (Array.isArray(value)) return value.length > MOST_NUMBERS ? "[…]" : JSON.stringify(value);
  if (typeof value !== "object" || value === null) return String(value);
  const { method, kind, ...others } = value as Record<string, unknown>;
  if (method === undefined) {
    const names = Object.keys(others).join();
    if (names === "" && kind !== undefined) return String(kind);
    return names === "multiplier" && kind === "constant" ? String(others.multiplier) : JSON.stringify(value);
  }
  const inner = shortText(value as Record<string, unknown>);
  return MARK.test(inner) ? `(${inner})` : inner;
}

/** White space as signs: a token may be nothing else. */
export function visible(token: string): string {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}

/** An encoding's parameters, one per line, long lists on one line each. */
export function parametersOf(pe: Pe): [name: string, value: string][] {
  return Object.entries(pe).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
}
