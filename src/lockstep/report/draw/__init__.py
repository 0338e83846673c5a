"""Render a report's document as files.

`markdown` and `page` render the text and tables. `vega` describes charts for the page and for `images`, in the colors
of `palette`. `files` writes the files atomically.
"""
