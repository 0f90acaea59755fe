// Texts for people.
import type { Pe } from "./types";

/** White space as signs: a token may be nothing else. */
export function visible(token: string): string {
  return token.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}

/** An encoding's parameters, one per line, long lists on one line each. */
export function parametersOf(pe: Pe): [name: string, value: string][] {
  return Object.entries(pe).map(([name, value]) => [name, typeof value === "string" ? value : JSON.stringify(value)]);
}
