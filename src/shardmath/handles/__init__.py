"""Arrays on the symmetric heap: allocation, rendezvous, and handles on what the peers hold."""
