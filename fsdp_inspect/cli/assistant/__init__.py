"""Tools for AI assistants: the `Run` API over the Model Context Protocol.

Every tool answers with the result of one `Run` method, the origin of its numbers, and the command
that shows the same numbers. A client can name only runs below the folder of the server.
"""
