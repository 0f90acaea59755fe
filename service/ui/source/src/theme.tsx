// Light and dark: as the system says, until the switch says otherwise.
import { useEffect, useState } from "preact/hooks";
import { store, stored } from "./view";

const KEY = "ropeway.theme";
const system = matchMedia("(prefers-color-scheme: dark)");
export const themes = new EventTarget();

export function isDark(): boolean {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : system.matches;
}

system.addEventListener("change", () => themes.dispatchEvent(new Event("change")));

export function ThemeSwitch() {
  const [theme, setTheme] = useState<string>(() => stored<string>(localStorage, KEY) ?? "");
  useEffect(() => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    store(localStorage, KEY, theme);
    themes.dispatchEvent(new Event("change"));
  }, [theme]);
  return (
    <label class="theme">
      Theme{" "}
      <select value={theme} onChange={(event) => setTheme(event.currentTarget.value)}>
        <option value="">as the system</option>
        <option value="light">light</option>
        <option value="dark">dark</option>
      </select>
    </label>
  );
}
