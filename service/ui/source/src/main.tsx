// The page: its parts, the models of the server, and the API key where the server asks for one.
import { type ComponentType, render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { access, address, type ApiError, asApiError, json } from "./api";
import { Field, Problem } from "./controls";
import { Encodings, TAB as ENCODINGS } from "./encodings/Encodings";
import { Generate, TAB as GENERATE } from "./generate/Generate";
import { Jobs, TAB as JOBS } from "./jobs/Jobs";
import { Reach, TAB as REACH } from "./reach/Reach";
import { ThemeSwitch } from "./theme";
import type { Method, Model } from "./types";
import { TAB as USE, Use } from "./use/Use";
import { useTab } from "./view";

export type Served = { models: Model[]; methods: Method[] };

const PARTS: { tab: string; title: string; part: ComponentType<Served> }[] = [
  { tab: GENERATE, title: "Generate", part: Generate },
  { tab: ENCODINGS, title: "Encodings", part: Encodings },
  { tab: REACH, title: "How far does it read?", part: Reach },
  { tab: USE, title: "Use it", part: Use },
  { tab: JOBS, title: "Jobs", part: Jobs },
];

function App() {
  const tab = useTab(PARTS.map((one) => one.tab));
  const [visited, visit] = useState<string[]>([]);
  const { served, error, load } = useServed();
  const [needsKey, setNeedsKey] = useState(false);
  const [keys, setKeys] = useState(0);
  useEffect(() => {
    access.refused = () => setNeedsKey(true);
    load();
  }, []);
  useEffect(() => {
    document.title = `${PARTS.find((one) => one.tab === tab)!.title} · Ropeway`;
    visit((before) => (before.includes(tab) ? before : [...before, tab]));
  }, [tab]);
  const enter = () => {
    setNeedsKey(false);
    setKeys((before) => before + 1); // every part begins again: refusals of the old key go
    load();
  };
  return (
    <>
      <header>
        <h1>Ropeway</h1>
        <nav aria-label="Parts of the page">
          {PARTS.map((one) => (
            <a key={one.tab} href={`#${one.tab}`} aria-current={one.tab === tab ? "page" : undefined}>{one.title}</a>
          ))}
        </nav>
        <ApiLink asks={needsKey || Boolean(access.key)} />
        <ThemeSwitch />
      </header>
      <datalist id="methods">
        <option value="auto">the encoding of the reserved length</option>
        {served?.methods.map((one) => <option key={one.method} value={one.method}>{one.summary}</option>)}
      </datalist>
      <main>
        {needsKey && <KeyForm enter={enter} />}
        {error && error.status !== 401 && <Problem text={error.message} again={load} />}
        {!served && !error && <p role="status">Loading</p>}
        {served &&
          PARTS.filter((one) => visited.includes(one.tab)).map(({ tab: name, part: Part, title }) => (
            <div key={`${name} ${keys}`} hidden={name !== tab}>
              <h2 class="aside">{title}</h2>
              <Part {...served} />
            </div>
          ))}
      </main>
    </>
  );
}

/** The documentation of the API. Links carry no key: where the server `asks` for one, it may be closed. */
function ApiLink({ asks }: { asks: boolean }) {
  const [closed, setClosed] = useState(false);
  const open = async (event: Event) => {
    if (!asks) return;
    event.preventDefault();
    const answer = await fetch(address("docs"), { credentials: "same-origin" }).catch(() => null);
    if (answer?.status === 401) setClosed(true);
    else location.assign(address("docs"));
  };
  return (
    <>
      <a href="../docs" onClick={open}>API</a>
      {closed && (
        <p class="problem" role="alert">
          A link carries no API key, so this server does not show its documentation. ROPEWAY_OPEN_DOCS=true on the server opens it.
        </p>
      )}
    </>
  );
}

/** The models, and the methods a little later: the first listing of methods takes the server a second or two. */
function useServed() {
  const [models, setModels] = useState<Model[] | null>(null);
  const [methods, setMethods] = useState<Method[]>([]);
  const [error, setError] = useState<ApiError | null>(null);
  const load = async () => {
    setError(null);
    try {
      setModels((await json<{ models: Model[] }>("models")).models);
    } catch (failure) {
      setError(asApiError(failure));
      return;
    }
    // Without the list, names of methods have no completion; nothing else depends on it.
    json<{ methods: Method[] }>("methods").then((listed) => setMethods(listed.methods), () => {});
  };
  return { served: models && { models, methods }, error, load };
}

/** Latin-1 without control characters: anything else would make every request fail in the browser. */
const SENDABLE = /^[ -~\xa0-\xff]*$/;

function KeyForm({ enter }: { enter: () => void }) {
  const field = useRef<HTMLInputElement>(null);
  const [key, setKey] = useState("");
  useEffect(() => field.current?.focus(), []);
  const [wrong, setWrong] = useState(access.key ? "The server does not know this key." : undefined);
  return (
    <form
      class="key"
      onSubmit={(event) => {
        event.preventDefault();
        if (!key.trim()) return setWrong("Enter a key.");
        if (!SENDABLE.test(key.trim())) return setWrong("This key is not valid: a header cannot carry all of its characters.");
        access.key = key.trim();
        enter();
      }}
    >
      <Field label="API key" error={wrong} hint="This server asks for one. It stays in this tab and goes with the tab.">
        {(control) => (
          <input {...control} ref={field} type="password" autocomplete="off" value={key}
            onInput={(event) => setKey(event.currentTarget.value)} />
        )}
      </Field>
      <button type="submit" class="main">Use this key</button>
    </form>
  );
}

render(<App />, document.getElementById("app")!);
