// One column: the answer under one encoding, its speed, and the encoding that took effect.
import { useLayoutEffect, useRef, useState } from "preact/hooks";
import { count, seconds } from "../controls";
import { parametersOf } from "../text";
import { Alternatives, type Shown } from "./Alternatives";
import { type Column, speed, tokensOf } from "./run";
import { Words } from "./words";

const WIDTH = 340;
const HEIGHT = 220;

type Props = { column: Column; version: number; number: number; promptTokens: number | null; trained: number };

export function Answer({ column, version, number, promptTokens, trained }: Props) {
  const title = `answer-${number}`;
  const known = column.end?.usage.prompt_tokens ?? promptTokens;
  const beyond = known === null ? 0 : known - trained;
  return (
    <article class="answer" aria-labelledby={title} data-state={column.state}>
      <h3 id={title}>{column.pe}</h3>
      <p class="speed">{speedText(column)}</p>
      {beyond >= 0 && known !== null && (
        <p class="trained-end">
          {beyond === 0 ? "The prompt fills" : `The prompt ends ${count(beyond)} tokens beyond`} the trained length of{" "}
          {count(trained)}
        </p>
      )}
      <Text column={column} version={version} room={known === null ? null : trained - known} trained={trained} />
      <p class="state" role="status">{stateText(column)}</p>
      {column.end && <InEffect end={column.end} />}
    </article>
  );
}

function Text(props: { column: Column; version: number; room: number | null; trained: number }) {
  const { column, version, room, trained } = props;
  const place = useRef<HTMLDivElement>(null);
  const words = useRef<Words | null>(null);
  const [at, setAt] = useState<number | null>(null);
  useLayoutEffect(() => {
    words.current = new Words(place.current!);
    setAt(null);
  }, [column]);
  useLayoutEffect(() => words.current?.draw(column.words, room, trained), [column, version, room, trained]);

  const pointed = (event: Event) => {
    const word = (event.target as HTMLElement).dataset?.word;
    setAt(word === undefined ? null : Number(word));
  };
  const moved = (event: KeyboardEvent) => {
    const last = column.words.length - 1;
    const to = { ArrowRight: (at ?? -1) + 1, ArrowLeft: (at ?? 1) - 1, Home: 0, End: last }[event.key];
    if (event.key === "Escape") setAt(null);
    if (to === undefined) return;
    event.preventDefault();
    setAt(Math.min(Math.max(to, 0), last));
  };
  const span = at === null ? undefined : words.current?.spans[at];
  return (
    <div class="text-place" onPointerLeave={(event) => event.pointerType === "mouse" && setAt(null)}>
      <div
        ref={place}
        class="text"
        dir="auto"
        tabIndex={0}
        role="group"
        aria-label={`Answer under ${column.pe}; the arrow keys show each token's alternatives`}
        onMouseOver={pointed}
        onClick={pointed}
        onKeyDown={moved}
        onBlur={() => setAt(null)}
      />
      {span && <Alternatives shown={beside(span, place.current!, column.words[at!]!)} />}
    </div>
  );
}

/** The place of the alternatives: below the word, or above it where the window has more room there. */
function beside(span: HTMLElement, place: HTMLElement, word: Column["words"][number]): Shown {
  const [box, around] = [span.getClientRects()[0] ?? span.getBoundingClientRect(), place.getBoundingClientRect()];
  const width = Math.min(WIDTH, document.documentElement.clientWidth - 16);
  const left = Math.max(8, Math.min(box.left, document.documentElement.clientWidth - width - 8));
  const below = window.innerHeight - box.bottom;
  const isAbove = below < HEIGHT && below < box.top;
  const top = isAbove ? "auto" : `${box.bottom - around.top + 4}px`;
  const bottom = isAbove ? `${around.bottom - box.top + 4}px` : "auto";
  return { word, maxWidth: `${width}px`, left: `${left - around.left}px`, top, bottom };
}

function speedText(column: Column): string {
  const { firstS, perSecond } = speed(column);
  const tokens = tokensOf(column);
  return [
    firstS === null ? "" : `first token after ${seconds(firstS)}`,
    perSecond === null ? "" : `${perSecond.toFixed(1)} tokens/s`,
    tokens ? `${count(tokens)} ${tokens === 1 ? "token" : "tokens"}` : "",
  ]
    .filter(Boolean)
    .join(" · ");
}

function stateText(column: Column): string {
  if (column.state === "waiting") return "Waiting for the first token";
  if (column.state === "reading" && column.read) {
    const { prompt_tokens_done, prompt_tokens_total } = column.read;
    return `Reading the prompt: ${count(prompt_tokens_done)} of ${count(prompt_tokens_total)} tokens`;
  }
  if (column.state === "writing") return "Writing";
  if (column.state === "stopped") return tokensOf(column) ? "Stopped before its end" : "Stopped before the first token";
  return column.end?.finish_reason === "stop" ? "Ended by the model" : "Ended at the most new tokens";
}

function InEffect({ end }: { end: NonNullable<Column["end"]> }) {
  return (
    <details>
      <summary>Encoding in effect: {end.pe.method}</summary>
      {end.auto && (
        <p class="hint">
          Chosen by <code>auto</code>: {end.auto.source}, above {count(end.auto.above)} tokens
          {end.auto.up_to === null ? "" : ` and up to ${count(end.auto.up_to)}`}.
        </p>
      )}
      <div class="scroll" tabIndex={0} role="region" aria-label="Parameters of the encoding in effect">
        <table class="parameters">
          <tbody>
            <tr><th scope="row">model</th><td>{end.model}</td></tr>
            {parametersOf(end.pe).map(([name, value]) => (
              <tr key={name}><th scope="row">{name}</th><td>{value}</td></tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  );
}
