"""The service: plan previews, submissions and a dashboard over HTTP. It never imports ray and never unpickles."""
