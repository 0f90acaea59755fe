// Prompts and encodings to begin with.
import { json } from "../api";
import type { Model } from "../types";

const FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. ";
const LONGER = 2.75;

export const EXAMPLES = [
  { name: "A sentence", prompt: "The import statement" },
  { name: "A story", prompt: "It was late in the evening when the carriage at last came up the hill, and" },
];

/** A passkey in filler, in all about 2.75 times the trained length of the model, as far as it takes that much. */
export async function passkey(model: Model): Promise<string> {
  const most = Math.min(LONGER * model.trained_length, 0.8 * model.max_length);
  const [one, many] = await Promise.all([1, 9].map((times) => tokens(model, FILLER.repeat(times))));
  const each = Math.max(1, (many! - one!) / 8);
  const times = Math.max(4, Math.floor((most - 3 * each) / each));
  const before = Math.round(0.3 * times);
  const hidden = "The pass key is 48213. Remember it. 48213 is the pass key. ";
  const head = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n\n";
  const tail = "\n\nWhat is the pass key? The pass key is";
  return head + FILLER.repeat(before) + hidden + FILLER.repeat(times - before) + tail;
}

export async function tokens(model: Model, prompt: string, signal?: AbortSignal): Promise<number> {
  const body = { prompt, model: model.id };
  return (await json<{ count: number }>("tokenize", { body, ...(signal && { signal }) })).count;
}

/** Encodings to begin with: a model without rotation has its own alone, unless that is a table, which has an end. */
export function compared(model: Model): string[] {
  if (model.pe.method === "learned") return ["default", "learned_interpolation:factor=4", "learned_hierarchical"];
  return model.pe.rotates_at === "never" ? ["default", "auto"] : ["default", "auto", "self_extend", "yarn:4"];
}
