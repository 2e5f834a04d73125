"""Answers of the service: models, problems, events, metrics and the OpenAPI document."""
