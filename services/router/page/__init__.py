"""The page that shows a cluster at work, and what it is fed with: `router.page`."""
