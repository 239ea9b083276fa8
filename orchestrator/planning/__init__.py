"""A wish becomes a launch plan: settings, files to ship, environment and shares, as one frozen value."""
