"""Import recordings of other tools as run folders: Kineto traces and CUDA memory snapshots."""
