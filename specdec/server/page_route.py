"""`/`: the page with a chat and its draft trees. It is static; its requests carry the API key."""

from fastapi import APIRouter, Response

from specdec.server.viewer import page

router = APIRouter()


@router.get("/", include_in_schema=False)
async def show_page() -> Response:
    """Return the page."""
    html, policy = page()
    headers = {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }
    return Response(html, headers=headers, media_type="text/html")
