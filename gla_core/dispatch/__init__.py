"""The contract and its helpers, and the discovery, requests and selection of backends."""
