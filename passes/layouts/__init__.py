"""Where the pieces of every tensor are, as its operands and the sharding rules say."""
