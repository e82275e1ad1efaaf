"""How the report's page looks: light, and in one column on a telephone."""

from __future__ import annotations

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 16px; max-width: 1180px; background: #ffffff; color: #1f2328;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: .4em 0 .2em; }
h2 { font-size: 1.25rem; margin: 2em 0 .4em; border-top: 1px solid #dfe3e8; padding-top: 1em; }
h3 { font-size: 1rem; margin: 1.6em 0 .2em; }
p { margin: .3em 0 .8em; max-width: 75ch; }
.muted, figcaption { color: #5b6470; font-size: .875rem; }
.grid { display: flex; flex-wrap: wrap; gap: 20px 28px; }
figure { margin: 0; flex: 1 1 290px; max-width: 362px; }
figure.wide { max-width: 700px; }
figcaption { margin-bottom: 4px; color: #1f2328; font-weight: 600; }
svg { width: 100%; height: auto; display: block; font-family: inherit; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; list-style: none; padding: 0; margin: .4em 0 .8em;
  font-size: .875rem; }
.legend span { display: inline-block; width: 12px; height: 12px; margin-right: 6px; border-radius: 2px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid #dfe3e8; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.slower { color: #b3261e; }
.facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.facts td:first-child { white-space: nowrap; overflow-wrap: normal; }
@media (max-width: 600px) {
  th:first-child, td:first-child { max-width: 9em; overflow: hidden; text-overflow: ellipsis; }
  th, td { padding: 4px 6px; }
}
ul.plain { padding-left: 1.2em; max-width: 80ch; }
""".strip()
