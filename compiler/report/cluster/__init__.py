"""What the page shows of machines: the cluster's picture, links, memory, servers."""
