// One job: how far it is, its answer in sentences, its figures so far, its files.
import { useState } from "preact/hooks";
import { access, address, type ApiError, asApiError, json, request } from "../api";
import { count, Problem, seconds } from "../controls";
import { Figures } from "../figures";
import { isUnfinished, type Job, type Result, useJob, useResult } from "./follow";

const FILES: [link: string, name: string, text: string][] = [
  ["results.csv", "results.csv", "CSV"],
  ["results.parquet", "results.parquet", "Parquet"],
  ["plot.png", "plot.png", "PNG"],
  ["report.html", "report.html?standalone=true", "Report, HTML"],
];

export function JobView(props: { id: string; title: string; only?: string; changed?: () => void }) {
  const { id, title, only, changed } = props;
  const [version, setVersion] = useState(0);
  const [failure, setFailure] = useState<ApiError | null>(null);
  const { job, error } = useJob(id, version);
  const result = useResult(job);
  const act = async (path: string, method: string) => {
    try {
      await json(path, { method });
      setFailure(null);
    } catch (refused) {
      setFailure(asApiError(refused));
    }
    setVersion((before) => before + 1);
    changed?.();
  };
  return (
    <section class="job" aria-label={title} data-state={job?.state ?? "loading"}>
      <h3 class="title">{title}</h3>
      <Problem text={failure?.message ?? error?.message} again={() => setVersion((before) => before + 1)} />
      {job && (
        <>
          <Bar job={job} />
          <div class="chips">
            {isUnfinished(job) && <button type="button" onClick={() => act(`jobs/${id}`, "DELETE")}>Cancel</button>}
            {(job.state === "cancelled" || job.state === "failed") && (
              <button type="button" onClick={() => act(`jobs/${id}/resume`, "POST")}>Resume</button>
            )}
            {FILES.filter(([link]) => job.links[link]).map(([link, name, text]) => (
              <Download key={link} path={`jobs/${id}/${name}`} file={`${job.evaluation}-${id.slice(0, 8)}-${link}`} text={text} />
            ))}
          </div>
          {job.error && <p class="error">{job.error.message}</p>}
          {job.not_served.length > 0 && <p class="error">It waits for a server of {job.not_served.join(", ")}.</p>}
        </>
      )}
      {result && <Answer result={result} only={only} />}
    </section>
  );
}

function Answer({ result, only }: { result: Result; only: string | undefined }) {
  const missing = Object.keys(result.partial?.missing ?? {});
  return (
    <>
      <div class="words">{result.words.map((sentence) => <p key={sentence}>{sentence}</p>)}</div>
      {missing.length > 0 && <p class="hint">Not complete yet: {missing.join(", ")}</p>}
      <Figures pictures={{ ...result, figures: result.figures.filter((one) => !only || one.name === only) }} />
    </>
  );
}

export function Bar({ job }: { job: Job }) {
  const left = job.seconds_left === null || !isUnfinished(job) ? "" : ` · about ${seconds(job.seconds_left)} left`;
  const spent = job.seconds ? ` · ${seconds(job.seconds)} of measuring` : "";
  const reused = job.units_reused ? ` · ${count(job.units_reused)} known from before` : "";
  return (
    <div class="progress">
      <progress max={job.tokens_total || 1} value={job.state === "done" ? job.tokens_total || 1 : job.tokens_done} aria-label={`Progress of ${job.evaluation}`} />
      <p class="hint" role="status">
        {job.state} · {count(job.units_done)} of {count(job.units_total)} units{spent}{left}{reused}
      </p>
    </div>
  );
}

/** A plain link, or with an API key a request that carries it. */
function Download({ path, file, text }: { path: string; file: string; text: string }) {
  const fetched = async (event: Event) => {
    if (!access.key) return;
    event.preventDefault();
    const blob = await (await request(path)).blob();
    const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: file });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };
  return <a href={address(path)} download={file} onClick={fetched}>{text}</a>;
}
