"""Reports: pages and figures made from results."""
