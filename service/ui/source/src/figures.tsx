// The project's own figures, drawn with Plotly's script of this server, which loads with the first of them.
import "../figures.js";
import { useEffect, useRef } from "preact/hooks";
import { address } from "./api";
import { Prose } from "./prose";
import { isDark, themes } from "./theme";

export type Picture = { name: string; title: string; subtitle: string; caption: string; data: unknown; wide: unknown; narrow: unknown };
export type Pictures = { figures: Picture[]; dark: Record<string, string>; script: string };

type Looks = { isNarrow: boolean; isDark: boolean };
declare global {
  interface Window {
    Plotly?: unknown;
    drawFigure: (div: HTMLElement, figure: Picture, colours: Record<string, string>, looks: Looks) => Promise<unknown>;
  }
}

const NARROW = 620;
let loading: Promise<void> | null = null;

function plotly(script: string): Promise<void> {
  loading ??= new Promise((done, failed) => {
    const element = document.createElement("script");
    element.src = address(script);
    element.onload = () => done();
    element.onerror = () => {
      loading = null;
      failed(new Error("the script that draws figures could not be loaded"));
    };
    document.head.append(element);
  });
  return loading;
}

export function Figures({ pictures }: { pictures: Pictures }) {
  return (
    <div class="figures">
      {pictures.figures.map((picture, index) => (
        <figure key={`${picture.name}-${index}`}>
          <h3 class="title">{picture.title}</h3>
          <p class="hint"><Prose text={picture.subtitle} /></p>
          <Drawing picture={picture} pictures={pictures} />
          <figcaption class="hint"><Prose text={picture.caption} /></figcaption>
        </figure>
      ))}
    </div>
  );
}

function Drawing({ picture, pictures }: { picture: Picture; pictures: Pictures }) {
  const place = useRef<HTMLDivElement>(null);
  useEffect(() => {
    const div = place.current!;
    let drawn = "";
    let gone = false;
    const draw = async () => {
      if (!div.clientWidth) return; // hidden: it is drawn when it shows
      const looks = { isNarrow: div.clientWidth < NARROW, isDark: isDark() };
      if (drawn === JSON.stringify(looks)) return;
      drawn = JSON.stringify(looks);
      try {
        await plotly(pictures.script);
        if (!gone) await window.drawFigure(div, picture, pictures.dark, looks);
      } catch (error) {
        div.textContent = `This figure cannot be drawn: ${(error as Error).message}`;
      }
    };
    const sizes = new ResizeObserver(draw);
    sizes.observe(div);
    themes.addEventListener("change", draw);
    return () => {
      gone = true;
      sizes.disconnect();
      themes.removeEventListener("change", draw);
    };
  }, [picture, pictures]);
  return <div ref={place} class="drawing" role="group" aria-label={`${picture.title}: ${picture.subtitle}`} />;
}
