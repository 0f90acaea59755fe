// Builds the page into the folder given as argument: script, style, page, icon, licences of the packages inside.
import { createHash } from "node:crypto";
import { copyFileSync, readdirSync, readFileSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { build } from "esbuild";

const out = process.argv[2];
const files = readdirSync(".", { recursive: true, withFileTypes: true })
  .filter((entry) => entry.isFile() && !entry.parentPath.includes("node_modules"))
  .map((entry) => join(entry.parentPath, entry.name))
  .sort();
const hash = createHash("sha256");
for (const file of files) hash.update(`${file}\n`).update(readFileSync(file));

// The hash of the sources is in the script: a test compares.
const banner = { js: `/* sources ${hash.digest("hex")}; licences of the packages inside: licenses.txt */` };
const common = { bundle: true, minify: true, target: "es2022", logLevel: "warning" };
await build({ ...common, entryPoints: ["src/main.tsx"], outfile: join(out, "app.js"), format: "iife", banner });
await build({ ...common, entryPoints: ["style.css"], outfile: join(out, "app.css"), target: "chrome123" });
for (const name of ["index.html", "icon.svg"]) copyFileSync(name, join(out, name));

const { dependencies } = JSON.parse(readFileSync("package.json", "utf8"));
const licence = (name) => `${name}\n\n${readFileSync(`node_modules/${name}/LICENSE`, "utf8").trim()}\n`;
writeFileSync(join(out, "licenses.txt"), Object.keys(dependencies).map(licence).join("\n\n"));
