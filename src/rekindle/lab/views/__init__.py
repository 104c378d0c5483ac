"""How a study is shown: sentences and tables, the terminal, drawings, the page, the atlas.

- `text`: what the numbers mean in sentences, the columns of the table;
- `terminal`: the live table while a study runs, the tables of its result;
- `svg`: colors, ticks, labels, the picture as SVG;
- `plots`: curves and forest plots as SVG that follows light and dark and shows names on hover;
- `figures`: which plots a study has;
- `atlas`: gains by remedy and stream, as a table and a heat map;
- `page`: the page, one self-contained HTML file.

Imports `lab.results` and the markup of `report`. Start with `text`.
"""
