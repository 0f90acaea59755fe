// The words of an answer as elements. They are added one by one: a long answer is never drawn again as a whole.
import type { Word } from "./run";

/** Classes of probability, most likely first: colour and underline, so that no colour is needed. */
export const CLASSES = [
  { name: "sure", from: 0.5, label: "50 % and more" },
  { name: "likely", from: 0.1, label: "10 to 50 %" },
  { name: "unlikely", from: 0.01, label: "1 to 10 %" },
  { name: "rare", from: 0, label: "below 1 %" },
];

/** A word without width, which gets a mark to point at. */
const FEEDS = /^[\r\n]+$/;

export function probability(word: Word): number | null {
  const least = Math.min(...word.tokens.map((token) => token.logprob));
  return word.tokens.length ? Math.exp(least) : null;
}

function classOf(word: Word): string {
  const share = probability(word);
  return share === null ? "" : CLASSES.find((one) => share >= one.from)!.name;
}

export class Words {
  private drawn = 0;
  private tokens = 0;
  private mark: HTMLElement | null = null;
  readonly spans: HTMLElement[] = [];

  constructor(readonly place: HTMLElement) {
    place.replaceChildren();
  }

  /** Add the words that are new. `room` is the number of tokens before the trained length ends, null if unknown. */
  draw(words: Word[], room: number | null, trained: number): void {
    const fresh = document.createDocumentFragment();
    for (; this.drawn < words.length; this.drawn++) {
      const word = words[this.drawn]!;
      const span = document.createElement("span");
      span.textContent = word.text;
      span.className = classOf(word);
      if (FEEDS.test(word.text)) span.classList.add("feed");
      span.dataset.word = String(this.drawn);
      span.dataset.before = String(this.tokens);
      this.tokens += word.tokens.length;
      this.spans.push(span);
      fresh.append(span);
    }
    this.place.append(fresh);
    this.place_mark(room, trained);
  }

  private place_mark(room: number | null, trained: number): void {
    if (this.mark || room === null || room <= 0 || this.tokens < room) return;
    const after = this.spans.findLast((span) => Number(span.dataset.before) < room);
    if (!after) return;
    this.mark = document.createElement("span");
    this.mark.className = "trained-end";
    this.mark.textContent = `trained length ends: ${trained.toLocaleString("en")} tokens`;
    after.after(this.mark);
  }
}
