// What the answers on screen were asked for, and its difference from the controls in words.
export const NUMBERS = ["max_new_tokens", "temperature", "seed"] as const;

export type Asked = { prompt: string; pe: string[]; model: string } & {
  [name in (typeof NUMBERS)[number]]: number | string | undefined;
};
export type Name = keyof Asked;

const NAMES: Record<Name, string> = {
  prompt: "prompt", pe: "encodings", model: "model", max_new_tokens: "most new tokens", temperature: "temperature", seed: "seed",
};
const BEGINNING = 60;

export function isSame(name: Name, one: Asked, other: Asked): boolean {
  return JSON.stringify(one[name]) === JSON.stringify(other[name]);
}

/** The fields that differ from those of `now`, as they were asked; empty if none does. */
export function differences(asked: Asked, now: Asked): string {
  const others = (Object.keys(NAMES) as Name[]).filter((name) => !isSame(name, asked, now));
  return others.map((name) => `${NAMES[name]} ${written(name, asked)}`).join("; ");
}

function written(name: Name, asked: Asked): string {
  if (name === "prompt") return beginning(asked.prompt);
  return name === "pe" ? asked.pe.join(" ") : String(asked[name] ?? "not set");
}

function beginning(prompt: string): string {
  const letters = [...prompt.slice(0, 2 * BEGINNING)];
  const isCut = letters.length > BEGINNING;
  return `“${letters.slice(0, BEGINNING).join("")}${isCut ? "…" : ""}”`;
}
