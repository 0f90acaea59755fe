// Files of the server, fetched with the API key: links cannot carry it.
import { useState } from "preact/hooks";
import { address, type ApiError, asApiError, request } from "../api";

type Props = {
  path: string;
  /** The name of the file on the reader's machine. */
  file: string;
  text: string;
  /** Gets each refusal with a function that fetches again, and null before each try. */
  failed: (error: ApiError | null, again: () => void) => void;
};

/** A link that is fetched: a refusal is shown, and clicks while it is under way do nothing. */
export function Download({ path, file, text, failed }: Props) {
  const [busy, setBusy] = useState(false);
  const fetched = async () => {
    setBusy(true);
    failed(null, fetched);
    try {
      save(await (await request(path)).blob(), file);
    } catch (failure) {
      failed(asApiError(failure), fetched);
    }
    setBusy(false);
  };
  const clicked = (event: Event) => {
    event.preventDefault();
    if (!busy) fetched();
  };
  return (
    <>
      <a href={address(path)} download={file} onClick={clicked} aria-busy={busy}>{text}</a>
      {busy && <span class="hint" role="status">Making the file {text}</span>}
    </>
  );
}

function save(blob: Blob, file: string): void {
  const link = Object.assign(document.createElement("a"), { href: URL.createObjectURL(blob), download: file });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
