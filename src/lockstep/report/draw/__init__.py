"""Render a report's document as files.

`markdown` and `page` render the text and tables. `images` draws charts for print, with `matplotlib_curves`;
`interval_svg` draws ranges for the page. All of them share `palette` and `ticks`. `files` writes the files atomically.
"""
