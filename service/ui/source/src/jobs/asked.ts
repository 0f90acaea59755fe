// What a job was asked: its lengths and its documents, in a few words.
import { count } from "../controls";
import type { Job } from "./follow";

const MOST_NAMED = 3;
/** A name of a built-in document, or a text as long as one. */
const NAME = /^[\w.-]{1,40}$/;

/** `256 to 1,024 tokens · persuasion`; empty for defaults. A list has the names of long texts, and not these. */
export function askedOf({ request }: Pick<Job, "request">): string {
  return [lengthsOf(request), documentsOf(request)].filter(Boolean).join(" · ");
}

function lengthsOf({ lengths, length }: Record<string, unknown>): string {
  const found = Array.isArray(lengths) ? lengths : lengths ? Object.values(lengths).slice(0, 2) : [length ?? []].flat();
  if (!found.length) return "";
  const [least, most] = [Math.min(...found), Math.max(...found)].map(count);
  return least === most ? `${most} tokens` : `${least} to ${most} tokens`;
}

function documentsOf({ input, names, evaluations }: Record<string, unknown>): string {
  if (Array.isArray(evaluations)) return evaluations.map((one) => one.evaluation).join(", ");
  const isList = Array.isArray(input) && typeof input[0] !== "number";
  const documents: unknown[] = isList ? input : input === undefined || input === null ? [] : [input];
  const called = Array.isArray(names) ? (names as string[]) : documents.map(nameOf);
  const more = called.length - MOST_NAMED;
  return called.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${count(more)} more` : "");
}

function nameOf(document: unknown): string {
  if (Array.isArray(document)) return `${count(document.length)} token ${document.length === 1 ? "id" : "ids"}`;
  const text = String(document);
  return NAME.test(text) ? text : `a text of ${count(text.length)} characters`;
}
