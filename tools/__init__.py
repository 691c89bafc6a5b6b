"""What only this repository needs: its generated pages, measured times and chosen settings. No part of the package."""
