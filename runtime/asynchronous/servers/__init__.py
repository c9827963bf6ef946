"""What servers do: events in, messages out; no sockets and no clocks."""
