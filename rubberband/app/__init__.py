"""The services that commands and the API call: estimate, measure, plan, run."""
