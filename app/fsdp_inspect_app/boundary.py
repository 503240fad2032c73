"""Restrict the dashboard to files in the folder that it was started with.

Runs come from a listing of that folder, so no address and no widget can name a file. The functions
follow links: a user who may write a run there must not make the dashboard show other files of this
machine.
"""

from fsdp_inspect.store.boundary import files_of_run, is_in_folder, refuse_links_out

__all__ = ["files_of_run", "is_in_folder", "refuse_links_out"]
