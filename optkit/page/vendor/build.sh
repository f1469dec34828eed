#!/usr/bin/env bash
# Bundles entry.js with the exact packages of package-lock.json (each with its SHA-512) into plot.js, and gathers their licences.
# Needs npm and a package index. Run it by `make vendor`; SHA256SUMS says what came out when it was last committed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$here"/package.json "$here"/package-lock.json "$here"/entry.js "$work"
cd "$work"
npm ci --ignore-scripts --no-audit --no-fund --loglevel=error
node_modules/.bin/esbuild entry.js --bundle --minify --format=iife --global-name=Plot --target=es2020 \
  --legal-comments=none --charset=utf8 --metafile=meta.json --log-level=warning --outfile=plot.js
node - <<'JS' > LICENSES.txt
const fs = require("fs");
const used = new Set();
const bundled = JSON.parse(fs.readFileSync("meta.json")).outputs["plot.js"].inputs;
for (const file of Object.keys(bundled).filter((each) => bundled[each].bytesInOutput)) {
  const found = file.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
  if (found) used.add(found[1]);
}
console.log("plot.js holds parts of these packages, each under the licence below its name.");
for (const name of [...used].sort()) {
  const folder = `node_modules/${name}`;
  const said = JSON.parse(fs.readFileSync(`${folder}/package.json`));
  const licence = fs.readdirSync(folder).find((file) => /^licen[sc]e/i.test(file));
  const text = licence ? fs.readFileSync(`${folder}/${licence}`, "utf8").trim() : `Licence: ${said.license}`;
  console.log(`\n${"=".repeat(80)}\n${name} ${said.version} (${said.license})\n\n${text}`);
}
JS
cp plot.js LICENSES.txt "$here"
cd "$here"
sha256sum plot.js LICENSES.txt > SHA256SUMS
