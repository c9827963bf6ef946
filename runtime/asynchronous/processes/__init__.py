"""The processes of an asynchronous job: their start, their sockets, and who watches over them."""
