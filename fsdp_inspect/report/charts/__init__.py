"""Draw charts as HTML and inline SVG, for the dashboard and for HTML reports.

A chart needs no script: positions are percentages, so it has the width of its container, and its
labels are text. `charts.css` holds its style. A page with scripts adds values under the pointer.
"""
