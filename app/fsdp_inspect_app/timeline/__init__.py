"""One step on a canvas: lanes a rank, level of detail on the server, drawing in the browser."""
