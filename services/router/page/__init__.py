"""The page of a running cluster, and its feed: `router.page`."""
