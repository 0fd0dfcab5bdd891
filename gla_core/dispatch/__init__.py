"""The contract, discovery, requests and selection of backends."""
