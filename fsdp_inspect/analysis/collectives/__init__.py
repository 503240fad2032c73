"""Match the collectives of several ranks, and derive queues and transfers from them."""
