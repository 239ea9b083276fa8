"""Output for users: tables, pages, charts, JSON documents."""
