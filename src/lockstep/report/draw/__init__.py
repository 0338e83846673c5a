"""Figures and pages out, from a report's document alone.

`markdown` and `page` write it, `images` draws its charts for print (by `matplotlib_curves`) and `interval_svg` ranges
for the page; `palette` and `ticks` are what all share, and `files` puts everything in its place, whole or not at all.
"""
