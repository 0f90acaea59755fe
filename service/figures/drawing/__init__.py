"""Parts of every picture: titles, axes, lines, bars, panels, and the drawing of a Plotly figure by Matplotlib."""
